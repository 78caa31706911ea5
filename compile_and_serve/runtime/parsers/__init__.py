"""Parsers of generated text: tool calls and reasoning become events, however the text is divided into chunks."""
