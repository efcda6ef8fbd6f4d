"""Data only: presets of models, architecture presets, chip ceilings, flagfiles, and the text of evaluations. Nothing here runs."""
