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
    /// What the user of the app may do.
    public var recoverySuggestion: String? {
        switch kind {
        case .build, .tokenizer: "Delete the model and get it again. If that does not help, it needs a newer version of the app."
        case .program: "Restart the app. If that does not help, restart the device, or choose another model."
        case .memory: "Close other apps, or choose a smaller model."
        case .interrupted: "Ask again."
        case .request: nil
        case .promptTooLong: "Begin a new conversation, or ask something shorter."
        }
    }
}
