"""Shows a dump of a compilation: as a web page (`page`), or as tables and comparisons in a terminal (`text`)."""
