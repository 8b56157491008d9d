"""Draft vocabulary: a drafter computes logits only of tokens that recent requests used."""
