"""One module for each kind of model, imported when a model of its kind is first used."""
