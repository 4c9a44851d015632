"""The stand-in world: two nodes, a hub, an engine and a kit, to rehearse the playbooks on."""
