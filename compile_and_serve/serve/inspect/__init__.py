"""Looking at a dump: as a page (`page`), as tables in a terminal (`text`), or against another dump (`compare`)."""
