"""Which ways of the search name the wrong ports of the corpus, and which ports only one of them names."""
