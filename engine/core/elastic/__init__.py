"""Elastic membership, pure: measured facts in, wanted owners and slow workers out, each with its reason in words."""
