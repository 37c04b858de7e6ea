"""`search`: passages from a folder of documents (BM25) or from a retriever behind HTTP."""
