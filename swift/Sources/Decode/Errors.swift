import Foundation

/// An error that an app can show: what is wrong, and what helps.
public struct ShardmillError: LocalizedError, Equatable, Sendable, CustomStringConvertible {
    /// What an error is about.
    public enum Kind: String, Sendable {
        /// model.json, or a file that it names, is missing, damaged or not supported.
        case build
        /// A tokenizer file is damaged or has a part that is not supported.
        case tokenizer
        /// A program can't be loaded or run.
        case program
        /// The system leaves the app too little memory for the model.
        case memory
        /// The model was unloaded or paused while it worked.
        case interrupted
        /// The caller asked for something that can't be done.
        case request
        /// The prompt does not fit into the context.
        case promptTooLong
    }

    /// What the error is about.
    public let kind: Kind
    /// One line: what is wrong, and what helps.
    public let message: String

    /// Make an error.
    public init(_ kind: Kind, _ message: String) {
        self.kind = kind
        self.message = message
    }

    public var description: String { message }
    /// What an alert shows.
    public var errorDescription: String? { message }
}
