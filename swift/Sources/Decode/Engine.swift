/// A built model in memory: tokens in, logits out.
///
/// The host does what the graph contract assigns to it: it looks up embeddings, computes the arrays of a pass, and
/// chains the parts. A rejected draft needs nothing: its slots are hidden by their positions until they are
/// overwritten.
package class Engine {
    /// The build's model.json.
    package let manifest: Manifest
    /// The positions in all slots.
    package private(set) var layout: KVLayout
    let table: Table
    /// Rows for each token and layer, the layers of a token one after the other; nil if no program reads them.
    private let rows: LayerRows?
    private let carry: Int
    private var layers: [(program: Program, experts: [(program: Program, count: Int)])] = []
    private var heads: [Program] = []
    private let columns = ColumnMemory()
    /// The adapter that the programs compute with; nil for the bare model.
    private(set) var adapter: AdapterVersion?
    /// What a drafter reads of each slot; nil if no drafter does.
    private(set) var taps: Taps?
    /// The last layer's output in the last pass, and the position of its first row.
    private(set) var last: (position: Int, rows: HostArray)?

    /// Load every program, at the shortest length of its context.
    ///
    /// - Parameters:
    ///   - manifest: the build's model.json.
    ///   - backend: what runs the programs.
    ///   - progress: called before each part is loaded, with its place.
    package convenience init(
        _ manifest: Manifest, backend: any Backend, progress: (Part, Int) throws -> Void = { _, _ in }
    ) throws {
        try self.init(of: manifest, backend, progress)
    }

    /// Internal, since Swift 6.0 warns of a recursion in a subclass of a class whose own initializer is `package`.
    init(of manifest: Manifest, _ backend: any Backend, _ progress: (Part, Int) throws -> Void) throws {
        self.manifest = manifest
        layout = KVLayout(manifest)
        table = try Table(manifest.embedding)
        if table.rows < manifest.vocab {
            throw ShardmillError(.build, "the embedding table has \(table.rows) rows, the vocabulary \(manifest.vocab)")
        }
        guard case .fixed(let channels) = manifest.parts[0].inputs["x"]![1], channels >= table.columns else {
            throw ShardmillError(.build, "\(manifest.parts[0].name): x has fewer channels than the embedding table")
        }
        carry = channels - table.columns
        rows = try LayerRows(manifest, columns: table.columns)
        layout.resize(manifest.lengths[0])
        for (place, part) in manifest.parts.enumerated() {
            try progress(part, place)
            let program = try Program(part, backend: backend)
            switch part.kind {
            case .layers: layers.append((program, []))
            case .experts: layers[layers.count - 1].experts.append((program, part.end - part.start))
            case .head: heads.append(program)
            case .encoder, .fuse, .join, .mtp: throw ShardmillError(.build, "\(part.name) is no part of a pass")
            }
        }
    }

    /// Return the program of a part of a pass.
    func program(_ name: String) -> Program? {
        let all = layers.flatMap { [$0.program] + $0.experts.map(\.program) } + heads
        return all.first { $0.part.name == name }
    }

    /// Forget every slot and go back to the shortest context.
    package func reset() throws {
        layout.reset()
        try move(to: manifest.lengths[0])
    }

    /// Move to the shortest context of at least `slots` slots; the contents of slots beyond it are forgotten.
    package func fit(_ slots: Int) throws {
        guard let length = manifest.lengths.first(where: { $0 >= slots }) else {
            throw ShardmillError(
                .promptTooLong, "a text takes \(slots) slots, the context has \(manifest.context): shorten it")
        }
        try move(to: length)
    }

    /// Move every part, or none if one can't be loaded at that length.
    private func move(to length: Int) throws {
        if length == layout.length { return }
        let (before, keep) = (layout.length, !layout.isEmpty)
        do {
            for part in layers { try part.program.move(to: length, keep: keep) }
        } catch {
            for part in layers { try part.program.move(to: before, keep: keep) }
            throw error
        }
        layout.resize(length)
    }

    /// Forget every slot, and make all states and caches anew: no mask hides what is not a number.
    package func renew() throws {
        for part in layers { try part.program.renew() }
        try reset()
    }

    /// Compute with an adapter of the build from now on, or with none; return whether that changes the weights.
    ///
    /// What the slots hold then belongs to the adapter before, which may have had the same name.
    ///
    /// - Throws: `ShardmillError` if the build has no such adapter, or it is damaged; the adapter before then stays.
    package func adapt(_ name: String?) throws -> Bool {
        let version = name.map(manifest.adapterVersion)  // read first: whatever is replaced later is noticed next time
        if version == adapter { return false }
        let matrices = try name.map(manifest.adapter) ?? [:]
        for part in layers { try part.program.adapt(matrices[part.program.part.name] ?? [:]) }
        adapter = version
        return true
    }

    /// Hide slots until they are written again.
    package func forget(_ slots: [Int]) { layout.forget(slots) }

    /// Return whether the next pass may start at a position, given what rings still hold.
    package func rewindable(_ position: Int) -> Bool { layout.rewindable(position) }

    /// Return how many tokens fed one by one from a position on can be undone; nil if any number.
    package func undoable(_ position: Int) -> Int? { layout.undoable(position) }

    /// The caches that the host keeps for all layers, by the names of inputs.
    var caches: [String: any Buffer] { layers.reduce(into: [:]) { $0.merge($1.program.caches) { $1 } } }

    /// Return the last layer's output at a position, without what a token carries beside it; nil if the last pass was
    /// elsewhere.
    func lastOutput(_ position: Int) -> [Float]? {
        guard let (first, rows) = last, first <= position, position < first + rows.shape[2] else { return nil }
        return (0..<table.columns).map { rows.values[$0 * rows.shape[2] + position - first] }
    }

    /// Keep from now on what a drafter reads of each slot.
    func keepTaps(_ layers: [Int]) {
        taps = taps ?? Taps(layers, slots: manifest.context, columns: table.columns)
    }

    /// Write each token's key and value into its slot and return the logits, which are valid until the next pass.
    package func forward(_ tokens: [Int], slots: [Int], positions: [Int]) throws -> Logits {
        let hidden = try hidden(tokens, slots: slots, positions: positions)
        let given = ["hidden": hidden]
        let rows = try heads.map { try $0.output(given, tokens: tokens.count) }
        let logits = Logits(rows, tokens: tokens.count, columns: columns)
        if logits.vocab != manifest.headRows {
            throw ShardmillError(.program, "the heads gave \(logits.vocab) rows, not \(manifest.headRows)")
        }
        return logits
    }

    /// Do the same as `forward`, but run only the programs that keep something for later passes.
    package func write(_ tokens: [Int], slots: [Int], positions: [Int]) throws {
        let keeping = layers.lastIndex { !$0.program.part.states.isEmpty || !$0.program.part.written.isEmpty }
        let parts = taps == nil ? keeping.map { $0 + 1 } : nil
        _ = try hidden(tokens, slots: slots, positions: positions, parts: parts)
    }

    /// Return the output [1, d, T, 1] of the last layer, or of the last of the first `parts` parts of layers.
    func hidden(_ tokens: [Int], slots: [Int], positions: [Int], parts: Int? = nil) throws -> HostArray {
        let x = try table.columns(of: tokens, carry: carry)
        var byToken: [String: HostArray] = [:]
        if let rows {
            byToken = try rows.arrays(tokens)
            byToken["embedded"] = carry == 0 ? x : try table.columns(of: tokens)
        }
        return try through(x, slots: slots, positions: positions, byToken, parts: parts)
    }

    /// Do the same as `hidden`, given the first part's x [1, channels, T, 1] and the inputs that depend on tokens.
    final func through(
        _ first: HostArray, slots: [Int], positions: [Int], _ byToken: [String: HostArray] = [:], parts: Int? = nil
    ) throws -> HostArray {
        var x = first
        if slots.max()! >= layout.length { try fit(slots.max()! + 1) }
        var given = try layout.arrays(slots: slots, positions: positions).merging(byToken) { $1 }
        do {
            for part in layers.prefix(parts ?? layers.count) { x = try output(of: part, x, &given, slots) }
        } catch {
            // Some programs may have folded tokens of a recurrence, and others not: no position may go on from there.
            if manifest.recurrence != nil { layout.reset() }
            throw error
        }
        last = (parts ?? layers.count) < layers.count ? nil : (positions[0], x)
        taps?.write(x, layer: layers.last?.program.part.end ?? 0, slots: slots)
        return x
    }

    /// Run the programs of a part of layers, and return the next part's x.
    private func output(
        of part: (program: Program, experts: [(program: Program, count: Int)]), _ x: HostArray,
        _ given: inout [String: HostArray], _ slots: [Int]
    ) throws -> HostArray {
        given["x"] = x
        taps?.write(x, layer: part.program.part.start, slots: slots)
        let lent = part.program.part.lent.isEmpty ? [:] : caches
        let hidden = try part.program.run(given, tokens: slots.count, lent: lent)
        if taps != nil {
            for (layer, output) in part.program.tapped {
                let rows = HostArray(shape: output.shape, values: try output.read()).firstTokens(slots.count)
                taps?.write(rows, layer: layer, slots: slots)
            }
        }
        return part.experts.isEmpty ? hidden : try join(hidden, width: x.shape[1], part.experts)
    }

    /// Return the next part's x, given the output of a part that ends before routed experts.
    ///
    /// The output has the channels of x, then the experts' input z, then each expert's weight for each token. A group
    /// of experts that no token is routed to does not run.
    private func join(_ hidden: HostArray, width: Int, _ experts: [(program: Program, count: Int)]) throws -> HostArray
    {
        let (stream, tokens) = (table.columns, hidden.shape[2])
        func channels(_ range: Range<Int>) -> HostArray {
            HostArray(
                shape: [1, range.count, tokens, 1],
                values: Array(hidden.values[range.lowerBound * tokens..<range.upperBound * tokens]))
        }
        let count = experts.map(\.count).reduce(0, +)
        if hidden.shape[1] < width + stream + count {
            throw ShardmillError(.program, "the output before routed experts has \(hidden.shape[1]) channels")
        }
        var x = channels(0..<width)
        let z = channels(width..<width + stream)
        var first = width + stream
        for (program, count) in experts {
            let weights = channels(first..<first + count)
            first += count
            if weights.values.allSatisfy({ $0 == 0 }) { continue }
            let added = try program.run(["x": z, "weights": weights], tokens: tokens)
            for place in 0..<stream * tokens { x.values[place] += added.values[place] }
        }
        return x
    }
}
