"""Tools of a conversation: which are offered, how they are forced, and how they reach the prompt."""
