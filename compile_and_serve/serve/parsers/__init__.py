"""Parsers of generated text: tool calls and reasoning become events, whatever the chunks that the text arrives in."""
