"""Federations whose clients live at sites of their own: what hub and sites do, whoever carries their letters."""
