"""Training samples: global sample index -> tokens, a pure function of the data and the seed.

    global sample --order--> source and row --packing, packed_rows--> documents of the row --> tokens
        --training_data--> batches

Workers that tokenize import ``order`` and ``packing``, which need no torch.
"""
