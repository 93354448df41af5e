"""Schedules: rules that make the compute actions of one pipeline. One module per family; `registry` names them all."""
