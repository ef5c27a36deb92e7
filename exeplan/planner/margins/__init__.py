"""How far below its bounds a plan stays, so that they are kept with a stated chance."""
