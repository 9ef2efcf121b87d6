"""FlashInfer's real host code on a machine without a GPU, and an oracle for its results."""
