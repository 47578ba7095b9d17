/// How a conversation becomes text: what stands before and after each message, and what an answer begins with.
///
/// The build proves it against the checkpoint's chat template; a template that does more is not in model.json.
public struct ChatFormat: Decodable, Equatable, Sendable {
    /// Who says a message.
    public enum Role: String, Sendable {
        /// The app's instructions.
        case system
        /// The user.
        case user
        /// The model.
        case assistant
    }

    /// What stands around the messages of a role.
    public struct Around: Decodable, Equatable, Sendable {
        /// The text before a message.
        public let before: String
        /// The text after a message.
        public let after: String
        /// Whether a message loses the white space at its ends; nil is false.
        public let strip: Bool?
    }

    /// The text before everything else.
    public let begin: String
    /// The text in place of a system message, if there is none; nil is none.
    public let withoutSystem: String?
    /// What stands around a system message; nil if there is no place for one.
    public let system: Around?
    /// What stands around a question.
    public let user: Around
    /// What stands around an answer.
    public let assistant: Around
    /// The text after which the answer begins.
    public let generate: String
    /// Tokens that end an answer, beside `eos_token_ids`.
    public let stop: [Int]

    private enum CodingKeys: String, CodingKey {
        case begin, system, user, assistant, generate, stop
        case withoutSystem = "without_system"
    }

    /// Return the text of a conversation, up to where the answer begins.
    ///
    /// - Throws: `ShardmillError` of kind `request` if the conversation is not of the form that the build has proven: a
    ///   system message if there is a place for one, then questions and answers in turn, a question at the end.
    public func text(of messages: [(role: Role, content: String)]) throws -> String {
        let told = messages.first?.role == .system ? 1 : 0
        if told == 1 && system == nil {
            throw ShardmillError(.request, "the model's chat format has no place for instructions")
        }
        let inTurn = messages.dropFirst(told).enumerated().allSatisfy { place, message in
            message.role == (place.isMultiple(of: 2) ? .user : .assistant)
        }
        if !inTurn || (messages.count - told).isMultiple(of: 2) {
            throw ShardmillError(.request, "a conversation needs questions and answers in turn, a question at the end")
        }
        var text = begin + (told == 1 ? "" : withoutSystem ?? "")
        for message in messages {
            let around = message.role == .user ? user : message.role == .assistant ? assistant : system ?? user
            let content = around.strip == true ? stripped(message.content) : message.content
            text += around.before + content + around.after
        }
        return text + generate
    }
}

/// Return a text without the white space at its ends, as Python's `str.strip` does it.
func stripped(_ text: String) -> String {
    func isSpace(_ scalar: Unicode.Scalar) -> Bool {
        scalar.properties.isWhitespace || (0x1C...0x1F).contains(scalar.value)
    }
    let scalars = text.unicodeScalars
    guard let first = scalars.firstIndex(where: { !isSpace($0) }), let last = scalars.lastIndex(where: { !isSpace($0) })
    else { return "" }
    return String(scalars[first...last])
}
