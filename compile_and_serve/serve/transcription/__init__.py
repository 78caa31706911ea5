"""Transcriptions and translations of audio: the form, the work beside the event loop, and what the answers look like."""
