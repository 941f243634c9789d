"""Procedures in Lua, submitted as data: their programs run in child processes that can reach nothing and be killed."""
