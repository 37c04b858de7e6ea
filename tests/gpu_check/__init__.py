"""`make gpu-check`: what only a GPU can show, as steps with deadlines, and one page of results as JSON to send back.

Steps are test suites, commands and benchmarks that exist for the CPU too. `--device cpu` runs them there as far as
they go. The step `numbers` needs PyTorch, transformers and requirements.txt only, no Ray and no network.
"""
