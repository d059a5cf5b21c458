"""Online data: text is tokenized into training samples while the model trains.

    blocks    files -> blocks that can be opened independently -> documents
    streams   global sample -> stream, and the rank that tokenizes it; stream -> its blocks, by formula;
              documents of one stream of one source -> rows; a position in it is three integers
    worker    a process: the rows of some streams, in the order of the samples (messages: worker_protocol)
    loader    the rows of this rank in each batch, and the position of every stream
    prepare   one-time preparation: tokenizer, validation split, block index

The tokens of global sample g depend only on the data section and the seed. Streams are independent of one another, so
each may be tokenized anywhere; the positions of the streams are all the state there is.
"""
