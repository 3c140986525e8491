"""The cluster view: which block lies where, as all instances' events say."""
