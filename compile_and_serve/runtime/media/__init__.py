"""Images and videos in prompts: fetched, decoded, cut into patches, and put in the place of their placeholders."""
