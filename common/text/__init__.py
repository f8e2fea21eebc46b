"""Data sets: rows are read, brought to one schema, rendered to text, tokenised and reported.

Data flows one way: `reading.load_examples` calls sources (files and the hub; or synthetic, the
embedded task), schemas (`Row`), for messages chat (templates), tokenise and data_report in this
order. Also of its face: example (token ids and their vocabulary), overlap (ROUGE).
"""
