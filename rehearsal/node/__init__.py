"""What runs inside a node of the rehearsal. Standard library only: a node has no other."""
