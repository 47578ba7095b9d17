/// Drafts from the build's own assistant (Gemma 4's): the tokens that it finds likeliest, whatever the sampling.
///
/// It keeps no text. For the newest token, at position p, it reads the model's last hidden state at p - 1, and the
/// caches that the host keeps for the model. docs/model-json.md in the repository says how.
package final class AssistantDrafter: Drafter {
    private let model: Engine
    private let join: Program
    private let layers: Program
    private let head: Program
    /// The rotary tables of the assistant.
    private let layout: KVLayout
    /// The channels of the assistant's own hidden states.
    private let width: Int
    /// The newest token of the text, and its position.
    private var newest = (token: 0, position: 0)

    /// Load the assistant of a session's build.
    ///
    /// - Throws: `ShardmillError` if the build has no assistant, or the assistant can't be loaded.
    package init(_ model: Session, backend: any Backend) throws {
        let manifest = model.engine.manifest
        guard let format = manifest.drafter, format.kind == .assistant else {
            throw ShardmillError(.request, "\(manifest.model) has no assistant to draft with")
        }
        self.model = model.engine
        layout = KVLayout(manifest.of(format))
        join = try Program(format.fuse, backend: backend)
        layers = try Program(format.parts[0], backend: backend)
        head = try Program(format.parts[1], backend: backend)
        width = format.parts[1].inputs["hidden"]![1].count(tokens: 1)
    }

    package func reset(_ prompt: [Int]) { newest = (prompt.last ?? 0, prompt.count - 1) }

    package func observe(_ emitted: [Int]) {
        newest = (emitted.last ?? newest.token, newest.position + emitted.count)
    }

    package func propose(_ limit: Int) throws -> Draft {
        // The model's last pass must have been at the position before.
        guard let read = model.lastOutput(newest.position - 1) else { return Draft() }
        try layers.move(to: model.layout.length, keep: false)
        let given = model.layout.before(newest.position, tables: layout)
        var draft = Draft()
        var (token, state) = (newest.token, read + [Float](repeating: 0, count: width))
        while draft.tokens.count < limit {
            let x = try model.table.columns(of: [token]).values + state
            let joined = try join.run(["x": HostArray(shape: [1, x.count, 1, 1], values: x)], tokens: 1)
            let hidden = try layers.run(given.merging(["x": joined]) { $1 }, tokens: 1, lent: model.caches)
            let (place, share) = likeliest(try head.run(["hidden": hidden], tokens: 1).values)
            draft.tokens.append(place)
            draft.confidence.append(share)
            (token, state) = (place, [Float](repeating: 0, count: read.count) + hidden.values)
        }
        return draft
    }
}
