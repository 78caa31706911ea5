"""The command line: `compile-and-serve serve | compile | generate | inspect | models | bench | cache`."""
