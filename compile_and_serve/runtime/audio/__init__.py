"""Speech to text: features of sound, the windows of a recording, and how a model of the Whisper kind is asked about them. No torch."""
