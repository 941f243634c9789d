"""The command `tga`."""
