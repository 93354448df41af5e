"""Schedules: generators of the compute actions of one pipeline. One module per family; `registry` lists them all."""
