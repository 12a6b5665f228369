"""Solution of the exercise in lesson 03, "who applies the update?"."""


def to_send(read, new):
    """On the worker: `read` is what it pulled, `new` what its optimizer made of it."""
    return new - read  # the change alone, as many bytes as the parameters


def at_server(held, message):
    """On the server: `held` are its parameters now. Returns what they shall be."""
    return held + message  # whatever they have become by now: a sum forgets nobody


# Two things to notice.
#
# * A sum does not care about order; "replace" does. All that the server needs is one operation that adds. (In
#   floating point the order shows in the last bits.)
# * With plain SGD the change is minus the learning rate times the gradient, and this *is* AsyncPS. With
#   momentum or Adam it is not: each worker then averages its own gradients only, and there are as many
#   optimizers as workers. TensorFlow 1 kept that state beside the variable, on the parameter server.
