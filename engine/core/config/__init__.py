"""A job: its fields, the rules between them, and the decisions that follow from them before training."""
