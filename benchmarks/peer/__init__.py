"""What peers.py is made of: the models, a loop a peer, the gate between blocks of steps, the processes, the chart."""
