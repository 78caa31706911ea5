"""From a conversation to a prompt, and from generated text to a message."""
