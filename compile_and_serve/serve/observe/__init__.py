"""What a server tells of itself: metrics, traces, load and speed."""
