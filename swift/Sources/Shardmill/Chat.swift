import ShardmillDecode

/// A text as it comes, in whole characters. If its reader stops, the generation ends; if its task is cancelled, reading
/// throws a `CancellationError` too.
public typealias TextPieces = Streamed<String>

/// A message of a conversation.
public struct Message: Equatable, Sendable {
    /// Who says it.
    public enum Role: String, Sendable {
        /// The app's instructions.
        case system
        /// The user.
        case user
        /// The model.
        case assistant
    }

    /// Who says it.
    public let role: Role
    /// The text.
    public let content: String

    /// Make a message.
    public init(_ role: Role, _ content: String) {
        self.role = role
        self.content = content
    }
}

/// One conversation with a model. Its tokens stay in the cache between turns, so that a turn only feeds what is new.
public actor Chat {
    private let model: ShardmillModel
    /// The conversation so far.
    public private(set) var messages: [Message]
    /// How the last answer ended, and what it took.
    public private(set) var last: GenerationSummary?
    private let line = Line()

    init(_ model: ShardmillModel, _ messages: [Message]) {
        self.model = model
        self.messages = messages
    }

    /// Answer a message, and yield the answer piece by piece in whole characters.
    ///
    /// To cancel, cancel the task that reads the stream, or stop reading: the generation ends after a pass, and the
    /// conversation goes on from before the message. A message that comes during an answer waits for the answer's end;
    /// messages are answered in the order in which their streams were made.
    nonisolated public func stream(_ text: String, options: ShardmillOptions = .init()) -> TextPieces {
        let place = line.join()
        return streaming { emit in try await self.answer(text, options, place, emit: emit) }
    }

    /// Answer a message and return the whole answer.
    nonisolated public func respond(to text: String, options: ShardmillOptions = .init()) async throws -> String {
        try await answer(text, options, line.join()) { _ in }
    }

    @discardableResult
    private func answer(
        _ text: String, _ options: ShardmillOptions, _ place: Int, emit: @escaping @Sendable (String) -> Void
    ) async throws -> String {
        defer { line.leave(place) }
        try await line.turn(place)
        let asked = messages + [Message(.user, text)]
        let prompt = try model.prompt(asked)
        let found = Pieces()
        last = try await model.generate(prompt, options, stop: Set(model.manifest.chat?.stop ?? [])) { piece in
            found.add(piece.text)
            emit(piece.text)
        }
        messages = asked + [Message(.assistant, found.text)]
        return found.text
    }
}

/// The pieces of an answer, gathered on the model's thread and read after its end.
private final class Pieces: @unchecked Sendable {
    private(set) var text = ""

    func add(_ piece: String) { text += piece }
}

extension ShardmillModel {
    /// Begin a conversation.
    ///
    /// - Parameter instructions: the system's message; none if empty.
    nonisolated public func chat(instructions: String = "") -> Chat {
        Chat(self, instructions.isEmpty ? [] : [Message(.system, instructions)])
    }

    /// Continue a text, and yield the continuation piece by piece.
    nonisolated public func complete(_ text: String, options: ShardmillOptions = .init()) -> TextPieces {
        streaming { emit in
            let prompt = try self.codec.encode(text, addSpecialTokens: true)
            _ = try await self.generate(prompt, options, stop: []) { emit($0.text) }
        }
    }

    /// Continue tokens, and yield the continuation piece by piece: for a conversation in a format of the caller's own.
    ///
    /// - Parameters:
    ///   - tokens: the whole prompt.
    ///   - stop: tokens that end the continuation, beside those of model.json.
    ///   - options: how much to generate, and how.
    nonisolated public func complete(
        _ tokens: [Int], stop: Set<Int> = [], options: ShardmillOptions = .init()
    ) -> TextPieces {
        streaming { emit in _ = try await self.generate(tokens, options, stop: stop) { emit($0.text) } }
    }

    /// Answer a conversation that the caller keeps, and yield the answer piece by piece.
    nonisolated public func answer(to messages: [Message], options: ShardmillOptions = .init()) -> TextPieces {
        streaming { emit in try await self.answer(messages, options) { emit($0.text) } }
    }

    /// Answer a conversation that the caller keeps.
    @discardableResult
    func answer(
        _ messages: [Message], _ options: ShardmillOptions, emit: @Sendable (Piece) -> Void
    ) async throws -> GenerationSummary {
        try await generate(try prompt(messages), options, stop: Set(manifest.chat?.stop ?? []), emit: emit)
    }

    /// Return the tokens of a conversation, up to where the answer begins.
    ///
    /// - Throws: `ShardmillError` if the build has no chat format, or the format does not fit the conversation.
    nonisolated func prompt(_ messages: [Message]) throws -> [Int] {
        guard let format = manifest.chat else {
            throw ShardmillError(
                .request, "\(manifest.model) has no chat format that this package can apply: use complete()")
        }
        let text = try format.text(
            of: messages.map { (ChatFormat.Role(rawValue: $0.role.rawValue) ?? .user, $0.content) })
        return try codec.encode(text, addSpecialTokens: false)
    }
}
