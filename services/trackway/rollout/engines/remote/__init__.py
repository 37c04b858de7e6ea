"""Inference servers behind HTTP as engines: vLLM and SGLang, their processes, requests, weights and digests.

`engine` has what the servers share; `vllm` and `sglang` have what each says in its own words. Imported by `open_engine`
only, by name. No torch here: the servers have environments of their own.
"""
