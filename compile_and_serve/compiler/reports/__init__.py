"""What a user can see of a compilation: dumps, verification, profiles."""
