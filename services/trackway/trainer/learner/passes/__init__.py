"""What a forward pass computes besides the model itself: what is measured of its logits."""
