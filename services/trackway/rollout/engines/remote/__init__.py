"""Inference servers behind HTTP as engines: vLLM and SGLang, their processes, requests, weights and digests.

`engine` has the shared part. `vllm` and `sglang` have the routes of each server. Imported only by `open_engine`, by
name. No torch here: the servers run in their own environments.
"""
