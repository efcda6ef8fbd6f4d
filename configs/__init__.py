"""Data only: presets of models, architecture presets, chip ceilings and flagfiles. Nothing here runs."""
