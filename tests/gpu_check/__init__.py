"""`make gpu-check`: what a GPU changes in engine and learner, checked and measured, as a report of one page.

It needs PyTorch, transformers and requirements.txt; no Ray, no network and no other service. On a machine without a GPU
the same checks run on the CPU, with a smaller model.
"""
