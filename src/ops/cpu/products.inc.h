// linear and gate_up over weights of any format.

template <class Format, class Product = Fma>
void element_product(const Block& block) {
  product_of_rows<ElementRow<Format, Product>>(block);
}

void product(const Block& block) {
  switch (block.w.format) {
    case WeightFormat::kF32:
      return element_product<F32>(block);
    case WeightFormat::kF16:
      return element_product<F16>(block);
    case WeightFormat::kBF16:
      return element_product<BF16>(block);
    case WeightFormat::kBF16Pairs:
      return element_product<F32, PairDot>(block);  // a pair has the bytes of a float
    case WeightFormat::kBF16In12:
      return product_in_12<Fma>(block);
    case WeightFormat::kBF16In12Pairs:
      return product_in_12<PairDot>(block);
    case WeightFormat::kF8E4M3:
      return element_product<E4M3>(block);
    case WeightFormat::kNvfp4:
      return tile_block<Nvfp4Tile>(block);
    case WeightFormat::kMxfp4:
      return tile_block<Mxfp4Tile>(block);
    case WeightFormat::kQ4:
      return tile_block<Q4Tile>(block);
    case WeightFormat::kFp8Block:
      return row_major_product<Fp8BlockRow>(block);
    case WeightFormat::kDecoded:
      return row_major_product<DecodedRow>(block);
  }
}

void linear(const LinearTask& task) {
  for (int64_t r = 0; r < task.x.rows; r += kBlockRows) {
    product({task.w, task.x, task.first, task.last - task.first, r, smaller(kBlockRows, task.x.rows - r),
             task.out + r * task.out_stride + task.first, task.out_stride});
  }
}

// The gate and up halves of a feed-forward layer, their activation, and its packing: a group of columns has
// all that its packed form needs.
void gate_up(const GateUpTask& task) {
  alignas(64) float gate[kBlockRows * kPackedColumns];
  alignas(64) float up[kBlockRows * kPackedColumns];
  for (int64_t r = 0; r < task.x.rows; r += kBlockRows) {
    const int64_t rows = smaller(kBlockRows, task.x.rows - r);
    for (int64_t n = task.first; n < task.last; n += kPackedColumns) {
      const int64_t columns = smaller(kPackedColumns, task.last - n);
      product({task.gate, task.x, n, columns, r, rows, gate, kPackedColumns});
      product({task.up, task.x, n, columns, r, rows, up, kPackedColumns});
      for (int64_t row = 0; row < rows; ++row) {
        float* joined = gate + row * kPackedColumns;
        float* other = up + row * kPackedColumns;
        if (task.gate_bias != nullptr) add_array(task.gate_bias + n, columns, joined);
        if (task.up_bias != nullptr) add_array(task.up_bias + n, columns, other);
        activate(task.activation, joined, other, columns, joined);
        pack(task.packing, joined, columns,
             task.out + (r + row) * task.out_stride +
                 n / kPackedColumns * kPackedGroupFloats[static_cast<int>(task.packing)]);
      }
    }
  }
}
