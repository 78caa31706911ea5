"""What model families with images share: their encoders' inputs and layers, positions of three rows, and the decoder that reads rows."""
