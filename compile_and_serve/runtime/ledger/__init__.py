"""What became of a request, and why: records that the scheduler, the engine and the server fill, each where it takes the times anyway."""
