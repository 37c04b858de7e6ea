"""Requests and replies of Tinker's API, by the names of its SDK (0.38). Losses and samples are protobuf instead."""
