"""Models of many clients behind one door: loaded once, asked together, answered over HTTP."""
