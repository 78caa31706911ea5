"""What is kept from start to start: its keys and its folders."""
