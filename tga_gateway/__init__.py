"""TGA Gateway, as it is installed: the launcher of the command `tga`, and the gateway's own package `app` inside.

Importing this package changes nothing in the process that imports it.
"""
