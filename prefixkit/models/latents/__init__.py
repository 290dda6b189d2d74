"""Multi-head latent attention: the linear maps from latents to K and V, and attention in two parts."""
