"""How frames and bootstrap data travel: the zmq control channel, and the bootstrap registry over HTTP."""
