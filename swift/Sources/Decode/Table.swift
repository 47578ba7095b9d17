import Foundation

/// The host's table of embeddings, mapped from its file: rows of fp16, or of int8 with a scale for each row.
package struct Table: Sendable {
    /// The number of rows.
    package let rows: Int
    /// The number of channels of a row.
    package let columns: Int
    private let data: Data
    private let start: Int
    private let scales: Int?

    /// Return whether a safetensors file has a tensor.
    static func contains(_ name: String, _ file: URL) throws -> Bool { try TensorFile(file).entries[name] != nil }

    /// Map the tensor `name` of a safetensors file. The file's header says where it lies.
    ///
    /// - Throws: `ShardmillError` of kind `build` if the file is truncated, or contains no such table.
    package init(_ file: URL, name: String = "embedding") throws {
        let tensors = try TensorFile(file)
        let (start, entry) = try tensors.place(name, ["F16": 2, "I8": 1], 2)
        rows = entry.shape[0]
        columns = entry.shape[1]
        if entry.dtype == "I8" {
            let (at, scale) = try tensors.place(name + ".scale", ["F16": 2], 1)
            guard scale.shape[0] == rows else {
                throw tensors.refusal("it has \(scale.shape[0]) scales for \(rows) rows")
            }
            scales = at
        } else {
            scales = nil
        }
        self.start = start
        data = tensors.data
    }

    /// Return rows as columns: [1, columns + carry, T, 1], the last `carry` channels zero.
    package func columns(of tokens: [Int], carry: Int = 0) throws -> HostArray {
        if let stray = tokens.first(where: { !(0..<rows).contains($0) }) {
            throw ShardmillError(.request, "token \(stray) is outside the vocabulary of \(rows)")
        }
        let count = tokens.count
        var found = HostArray(zeros: [1, columns + carry, count, 1])
        data.withUnsafeBytes { bytes in
            found.values.withUnsafeMutableBufferPointer { into in
                for (t, token) in tokens.enumerated() {
                    if let scales {
                        let scale = half(bytes, scales + 2 * token)
                        let row = start + token * columns
                        for c in 0..<columns { into[c * count + t] = Float(Int8(bitPattern: bytes[row + c])) * scale }
                    } else {
                        let row = start + token * columns * 2
                        for c in 0..<columns { into[c * count + t] = half(bytes, row + 2 * c) }
                    }
                }
            }
        }
        return found
    }
}

/// A safetensors file, mapped.
struct TensorFile {
    struct Entry: Decodable {
        let dtype: String
        let shape: [Int]
        let data_offsets: [Int]
    }

    let data: Data
    /// The tensors by name.
    let entries: [String: Entry]
    /// What the file says of itself.
    let metadata: [String: String]
    private let file: URL
    /// The first byte after the header.
    private let content: Int

    /// - Throws: `ShardmillError` of kind `build` if the file is missing, or its header is damaged.
    init(_ file: URL) throws {
        func refusal(_ reason: String) -> ShardmillError { ShardmillError(.build, "\(file.path): \(reason)") }
        self.file = file
        guard let data = try? Data(contentsOf: file, options: .alwaysMapped) else { throw refusal("it can't be read") }
        guard data.count >= 8 else { throw refusal("it is truncated") }
        let size = data.prefix(8).enumerated().reduce(UInt64(0)) { $0 | UInt64($1.element) << (8 * UInt64($1.offset)) }
        guard size <= UInt64(data.count - 8), size <= 100_000_000 else { throw refusal("its header is truncated") }
        do {
            var all = try JSONSerialization.jsonObject(with: data[8..<8 + Int(size)]) as? [String: Any] ?? [:]
            metadata = all.removeValue(forKey: "__metadata__") as? [String: String] ?? [:]
            let text = try JSONSerialization.data(withJSONObject: all)
            entries = try JSONDecoder().decode([String: Entry].self, from: text)
        } catch {
            throw refusal("its header is damaged: \(describe(error))")
        }
        self.data = data
        content = 8 + Int(size)
    }

    func refusal(_ reason: String) -> ShardmillError { ShardmillError(.build, "\(file.path): \(reason)") }

    /// Return the first byte of a tensor after checking its type, shape and place.
    ///
    /// - Parameters:
    ///   - name: the tensor's name.
    ///   - types: the bytes of an element of each type that the tensor may have.
    ///   - extents: the number of its extents.
    func place(_ name: String, _ types: [String: Int], _ extents: Int) throws -> (Int, Entry) {
        guard let entry = entries[name] else { throw refusal("it contains no tensor '\(name)'") }
        guard let bytes = types[entry.dtype], entry.shape.count == extents,
            entry.shape.allSatisfy({ (1...1 << 28).contains($0) }), entry.data_offsets.count == 2
        else { throw refusal("the tensor '\(name)' is \(entry.dtype) \(entry.shape)") }
        let (begin, end) = (entry.data_offsets[0], entry.data_offsets[1])
        let size = entry.shape.reduce(Double(bytes)) { $0 * Double($1) }
        guard begin >= 0, end <= data.count - content, begin <= end, Double(end - begin) == size
        else { throw refusal("the tensor '\(name)' is truncated") }
        return (content + begin, entry)
    }

    /// Return a matrix of fp32.
    func floats(_ name: String) throws -> HostArray {
        let (start, entry) = try place(name, ["F32": 4], 2)
        let count = entry.shape[0] * entry.shape[1]
        let values = data.withUnsafeBytes { bytes in (0..<count).map { Float(bitPattern: word(bytes, start + 4 * $0)) } }
        return HostArray(shape: entry.shape, values: values)
    }

    /// Return the rows of a matrix of 32-bit integers.
    func integers(_ name: String) throws -> [[Int]] {
        let (start, entry) = try place(name, ["I32": 4], 2)
        let columns = entry.shape[1]
        return data.withUnsafeBytes { bytes in
            (0..<entry.shape[0]).map { row in
                (0..<columns).map { Int(Int32(bitPattern: word(bytes, start + 4 * (row * columns + $0)))) }
            }
        }
    }

    /// Return a tensor of fp16 that must have a shape.
    func halves(_ name: String, shape: [Int]) throws -> HostArray {
        let (start, entry) = try place(name, ["F16": 2], shape.count)
        if entry.shape != shape { throw refusal("the tensor '\(name)' is \(entry.shape), not \(shape)") }
        var found = HostArray(zeros: shape)
        data.withUnsafeBytes { bytes in
            for place in found.values.indices { found.values[place] = half(bytes, start + 2 * place) }
        }
        return found
    }
}

/// The host's table of rows for each token and layer, and the inputs that take them.
struct LayerRows: Sendable {
    private let table: Table
    /// The layer of each input.
    private let inputs: [String: Int]
    private let layers: Int

    /// Map the table `per_layer` of a build; nil if no part reads it.
    ///
    /// - Parameter columns: of the table `embedding`, whose rows the input `embedded` takes.
    /// - Throws: `ShardmillError` of kind `build` if the table does not fit the inputs.
    init?(_ manifest: Manifest, columns: Int) throws {
        func refuse(_ part: Part, _ input: String) -> ShardmillError {
            ShardmillError(.build, "model.json: \(part.name): the input '\(input)' does not fit the host's table")
        }
        let parts = manifest.parts.filter { $0.kind == .layers }
        if !parts.contains(where: {
            $0.inputs["embedded"] != nil || $0.inputs.keys.contains { Part.layer(ofRow: $0) != nil }
        }) {
            return nil
        }
        table = try Table(manifest.embedding, name: "per_layer")
        layers = table.rows / manifest.vocab
        var found: [String: Int] = [:]
        for part in parts {
            if let shape = part.inputs["embedded"], shape[1] != .fixed(columns) { throw refuse(part, "embedded") }
            for (input, shape) in part.inputs {
                guard let layer = Part.layer(ofRow: input) else { continue }
                if layer >= layers || shape[1] != .fixed(table.columns) { throw refuse(part, input) }
                found[input] = layer
            }
        }
        inputs = found
    }

    /// Return the tokens' rows for each layer by the names of inputs: p_i [1, P, T, 1].
    func arrays(_ tokens: [Int]) throws -> [String: HostArray] {
        try inputs.mapValues { layer in try table.columns(of: tokens.map { $0 * layers + layer }) }
    }
}

/// Return the little-endian 32 bits at a byte.
private func word(_ bytes: UnsafeRawBufferPointer, _ at: Int) -> UInt32 {
    UInt32(littleEndian: bytes.loadUnaligned(fromByteOffset: at, as: UInt32.self))
}

/// Return the little-endian fp16 number at a byte.
private func half(_ bytes: UnsafeRawBufferPointer, _ at: Int) -> Float {
    Half.float(UInt16(littleEndian: bytes.loadUnaligned(fromByteOffset: at, as: UInt16.self)))
}
