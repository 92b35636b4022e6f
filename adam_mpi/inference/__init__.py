"""Use a trained network: load, predict, look into layers, evaluate, export to and import from other programs."""
